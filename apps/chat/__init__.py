"""The web chat: conversations in the database, answers recorded by the server, a page that watches."""
