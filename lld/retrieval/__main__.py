"""`python -m lld.retrieval`: see lld/retrieval/command.py."""

from lld.retrieval.command import main

main()
