"""`python -m vidax`."""

from vidax.cli import main

raise SystemExit(main())
