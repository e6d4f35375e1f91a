"""`python -m toolkit` is the command `toolkit`."""

import sys

from toolkit.cli import main

sys.exit(main())
