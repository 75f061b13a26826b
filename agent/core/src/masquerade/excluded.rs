//! The ip-masq-agent file and the list in force.
