"""`python -m lld.ask`: see lld/ask/session.py."""

import sys

from lld.ask.session import main

sys.exit(main())
