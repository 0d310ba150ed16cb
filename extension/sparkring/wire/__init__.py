"""The communication between driver, members and ranks: messages and the channel."""
