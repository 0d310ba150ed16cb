"""The communication between driver, members and ranks: messages, the channel, and the ticket of a member."""
