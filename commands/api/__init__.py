"""The front door: commands, their outcomes and the read models over HTTP. Names no event, no command and no view."""
