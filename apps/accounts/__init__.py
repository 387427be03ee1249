"""Who may call: API keys, session users, WebSocket tickets."""
