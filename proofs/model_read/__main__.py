import sys

from proofs.checker import main
from proofs.model_read.checks import CHECKER

sys.exit(main(CHECKER))
