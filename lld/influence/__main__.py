"""`python -m lld.influence`: see lld/influence/closed_form.py."""

import sys

from lld.influence.closed_form import main

sys.exit(main())
