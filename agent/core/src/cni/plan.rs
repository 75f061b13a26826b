//! The ordered steps of ADD, CHECK and DEL, each with its inverse.
