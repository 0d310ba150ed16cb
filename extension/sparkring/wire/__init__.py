"""How the driver, members and ranks communicate: messages, the channel, and the ticket of a member."""
