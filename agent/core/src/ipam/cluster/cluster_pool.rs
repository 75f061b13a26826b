//! One block of the cluster pool for each node.
