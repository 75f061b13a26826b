//! CNI specification 1.1.0: request, result and error types.
