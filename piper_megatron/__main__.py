"""`python -m piper_megatron`, for launchers that start modules."""

import sys

from piper_megatron.cli.main import main

sys.exit(main())
