"""balances by owner and by cents"""

import sqlalchemy as sa
from alembic import op

revision = "b7d40c6e19a2"
down_revision = "6d9363487a46"


def upgrade() -> None:
    op.create_index(
        "balances_v2_by_cents_account_031a120f", "balances_v2", ["cents", "account"], unique=False, if_not_exists=True
    )
    op.create_index(
        "balances_v2_by_owner_account_7bb00a91",
        "balances_v2",
        [sa.literal_column('left("owner", 100) collate "C"'), "account"],
        unique=False,
        if_not_exists=True,
    )
