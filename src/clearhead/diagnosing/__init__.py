"""How diagnose finds a mistake: the textbook as data (recipe), what it gives (workings), the catalogue, the search."""
