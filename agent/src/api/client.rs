//! Blocking client of the agent API.
