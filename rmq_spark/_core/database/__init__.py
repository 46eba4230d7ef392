"""A user's database through SQLAlchemy: connections, URLs, and the fast way to insert rows."""
