"""Pages and pictures: self-contained HTML files with the numbers and the program that draws them; notebook output.

Objects such as AttentionMatrix load it when they are asked to show themselves. A page is a JSON header and named
arrays.
"""
