"""`python -m pd_engine.native`: builds the library into the user's cache, so that the first start need not."""

from __future__ import annotations

import sys

from pd_engine.native.build import NativeUnavailable, build
from pd_model.folder import default_cache_dir

try:
    sys.stdout.write(f"native kernels: {build(default_cache_dir())}\n")
except NativeUnavailable as error:
    sys.stdout.write(f"no native kernels, torch's are used instead: {error.message}\n")
