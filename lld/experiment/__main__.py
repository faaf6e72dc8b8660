"""`python -m lld.experiment`: see lld/experiment/runner.py."""

import sys

from lld.experiment.runner import main

sys.exit(main())
