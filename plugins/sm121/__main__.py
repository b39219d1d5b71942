"""``python -m sm121``."""

import sys

from sm121.cli import main

sys.exit(main())
