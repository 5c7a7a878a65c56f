import sys

from proofs.checker import main
from proofs.model.checks import CHECKER

sys.exit(main(CHECKER))
