"""`python -m clearhead` is `clearhead`."""

import sys

from clearhead.cli import main

sys.exit(main())
