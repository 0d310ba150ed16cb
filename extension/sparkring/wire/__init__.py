"""How the driver, members and ranks talk: the messages, the channel, and the ticket that a member starts with."""
