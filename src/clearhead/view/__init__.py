"""Pages to look at: one HTML file that holds the numbers and all that draws them, and pictures for notebooks.

The floor is below the objects that save themselves; a page is a header of plain words and numbers, and named arrays.
"""
