//! The fields of a structure, read from the type information (BTF) of the eBPF object.
//!
//! Layouts are those of `linux/btf.h`, documented at <https://docs.kernel.org/bpf/btf.html>.

use super::layout::{Field, Row};

/// `btf_header.magic`
const MAGIC: u16 = 0xeb9f;

const INT: u32 = 1;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const FUNC_PROTO: u32 = 13;
const VAR: u32 = 14;
const DATASEC: u32 = 15;
const DECL_TAG: u32 = 17;
const ENUM64: u32 = 19;

/// Type information in the format of the object and the kernel.
pub(super) struct Btf<'a> {
    /// Offset of each type; the ID of a type is its index plus 1.
    types: Vec<&'a [u8]>,
    strings: &'a [u8],
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

impl<'a> Btf<'a> {
    /// `None` if the bytes are not type information in this machine's byte order.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        if u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?) != MAGIC {
            return None;
        }
        let section = |offset: usize, length: usize| {
            let start = (word(bytes, 4)? as usize).checked_add(word(bytes, offset)? as usize)?;
            bytes.get(start..start.checked_add(word(bytes, length)? as usize)?)
        };
        let (mut rest, strings) = (section(8, 12)?, section(16, 20)?);
        let mut types = Vec::new();
        while !rest.is_empty() {
            types.push(rest);
            rest = rest.get(length(rest)?..)?;
        }
        Some(Self { types, strings })
    }

    fn name(&self, offset: u32) -> Option<String> {
        let bytes = self.strings.get(offset as usize..)?;
        let end = bytes.iter().position(|byte| *byte == 0)?;
        Some(String::from_utf8_lossy(bytes.get(..end)?).into_owned())
    }

    /// The fields of the structure with this ID, and its size. A type that is not a structure is one field without a
    /// name.
    pub(super) fn row(&self, number: u32) -> Option<Row> {
        let mut found = *self.types.get((number as usize).checked_sub(1)?)?;
        // Aliases never form a cycle; as many steps as there are types suffice.
        for _ in 0..self.types.len() {
            let aliased = word(found, 8)? as usize;
            match kind(word(found, 4)?) {
                TYPEDEF | VOLATILE | CONST => found = self.types.get(aliased.checked_sub(1)?)?,
                STRUCT => return self.structure(found),
                INT => {
                    let size = word(found, 8)? as usize;
                    return Some(Row { size, fields: vec![Field { name: String::new(), offset: 0, size }] });
                }
                _ => return None,
            }
        }
        None
    }

    /// Fields are adjacent without padding, so that each ends where the next one starts.
    fn structure(&self, found: &[u8]) -> Option<Row> {
        let size = word(found, 8)? as usize;
        let count = (word(found, 4)? & 0xffff) as usize;
        let mut starts = Vec::with_capacity(count);
        for member in 0..count {
            let at = 12 + member * 12;
            starts.push((self.name(word(found, at)?)?, (word(found, at + 8)? / 8) as usize));
        }
        starts.sort_by_key(|(_, offset)| *offset);
        let ends: Vec<usize> = starts.iter().skip(1).map(|(_, offset)| *offset).chain([size]).collect();
        let fields = starts
            .into_iter()
            .zip(ends)
            .map(|((name, offset), end)| Some(Field { name, offset, size: end.checked_sub(offset)? }))
            .collect::<Option<_>>()?;
        Some(Row { size, fields })
    }
}

const fn kind(info: u32) -> u32 {
    info >> 24 & 0x1f
}

/// Size of the type that starts here.
fn length(bytes: &[u8]) -> Option<usize> {
    let info = word(bytes, 4)?;
    let count = (info & 0xffff) as usize;
    let more = match kind(info) {
        INT | VAR | DECL_TAG => 4,
        ARRAY => 12,
        STRUCT | UNION | DATASEC | ENUM64 => count.checked_mul(12)?,
        ENUM | FUNC_PROTO => count.checked_mul(8)?,
        _ => 0,
    };
    Some(12 + more)
}
