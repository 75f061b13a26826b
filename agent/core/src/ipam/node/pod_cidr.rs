//! Host-scope allocation from the pod CIDR of the node.
