"""`python -m lld.share`: see lld/share/upload.py."""

import sys

from lld.share.upload import main

sys.exit(main())
