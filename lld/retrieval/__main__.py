"""`python -m lld.retrieval`: see lld/retrieval/backends.py."""

from lld.retrieval.backends import main

main()
