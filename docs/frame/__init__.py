"""The frame of the site: what docs/site.py puts around the pages.

outline      the order of the pages
staging      copies the written pages, leads their links to where things are on the site, adds the generated ones
docstrings   a docstring as Markdown; reference: the pages of every public name; tables: of every rule and statistic
commands     the pages of every command, from the parsers; errors: of every error, with an example that raises it
chinese      the generated pages in Chinese, from the translations in docs/zh/reference
figures      the lessons' figures, which commands write
texts        llms.txt and llms-full.txt; the door that goes to the reader's language
checking     links, anchors and requests of the built pages
conf         Sphinx's settings; searching: how Chinese is searched
"""
