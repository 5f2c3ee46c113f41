"""Compilation for TPUs that are not there; read when libtpu is loaded."""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server is asked
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a benchmark may be compiling too
