"""Makes pages, pictures and notebook output; a page is one HTML file with the numbers and the program that draws them.

Objects such as AttentionMatrix import this package when they are shown or saved. A page's content is a JSON header and
named arrays.
"""
