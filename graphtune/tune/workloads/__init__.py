"""Where traffic comes from: request traces, server logs and tables, and what a deployment makes of it."""
