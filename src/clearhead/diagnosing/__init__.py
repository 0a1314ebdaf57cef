"""`ch.diagnose`: the textbook's attention as data (recipe), its numbers (workings), the catalogue and the search."""
