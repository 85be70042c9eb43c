"""Which keys a framework's files have, and which of them do not change memory: one file a framework."""
