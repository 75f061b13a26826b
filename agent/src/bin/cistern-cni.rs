//! The CNI plugin of Cistern.
fn main() {}
