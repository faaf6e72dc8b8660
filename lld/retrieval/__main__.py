"""`python -m lld.retrieval`: see lld/retrieval/build.py."""

from lld.retrieval.build import main

main()
