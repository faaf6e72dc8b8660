"""`python -m lld.report`: see lld/report/figure.py."""

import sys

from lld.report.figure import main

sys.exit(main())
