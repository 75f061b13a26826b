//! Carving CIDRs into equal blocks.
