"""`python -m lld.influence`: see lld/influence/command.py."""

import sys

from lld.influence.command import main

sys.exit(main())
