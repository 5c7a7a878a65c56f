import sys

from proofs.checker import main
from proofs.model_source.checks import CHECKER

sys.exit(main(CHECKER))
