"""NVFlare's side: its tasks carry the messages, its provisioning says who is connected."""

TASK, RECORD, TOKEN = "fpfl", "fpfl", "token"
"""The name of all tasks; where a message is in a task; and what a reply is told apart by."""

PLACE = "local/fpfl"
"""Where a site's own files are in its NVFlare workspace; no job writes there."""
