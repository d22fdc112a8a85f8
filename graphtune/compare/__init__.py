"""Two sweeps side by side: what got slower, larger, faster or smaller, and what cannot be told apart."""
