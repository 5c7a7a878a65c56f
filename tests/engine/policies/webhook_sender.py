"""A process that posts all webhooks of the policy `letters`: `python tests/engine/policies/webhook_sender.py NAME DELAY_S`."""

import asyncio
import sys

from infra.settings import Settings
from policies.engine import webhooks as engine

if __name__ == "__main__":
    engine.POLL_S = 0.05
    settings = Settings()
    engine.DELAYS_S = [float(sys.argv[2])] * 500
    asyncio.run(engine.Webhooks(settings, sys.argv[1]).run())
