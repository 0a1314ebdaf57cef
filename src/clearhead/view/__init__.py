"""Pages and pictures: self-contained HTML files with the numbers and the program that draws them; notebook output.

Public objects such as AttentionMatrix import this package, not the reverse: it reads them through protocols.py. A
page is a JSON header and named arrays.
"""
