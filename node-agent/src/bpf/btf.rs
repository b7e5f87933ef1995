//! Offsets of fields in the kernel's structs, from the kernel's own BTF.
//!
//! Rust's BPF target has no CO-RE relocations, so that the agent looks offsets
//! up and hands them to the programs as constants. Only what that needs of the
//! format is read here (Documentation/bpf/btf.rst); aya-obj parses BTF too, but
//! keeps the members of structs to itself.

use std::path::Path;
use std::{fs, io};

/// Where the kernel shows its BTF (`CONFIG_DEBUG_INFO_BTF`).
const KERNEL_BTF: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_FUNC_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_DATASEC: u32 = 15;
const KIND_DECL_TAG: u32 = 17;
const KIND_ENUM64: u32 = 19;
const KIND_INT: u32 = 1;

/// How deep anonymous members are searched.
const MAX_DEPTH: u32 = 8;

/// Parsed BTF.
pub(super) struct Btf {
    types: Vec<Type>,
    strings: Vec<u8>,
}

/// Why an offset is not known.
#[derive(Debug, thiserror::Error)]
pub(super) enum BtfError {
    #[error("the kernel has no BTF at {KERNEL_BTF} (CONFIG_DEBUG_INFO_BTF)")]
    Absent(#[source] io::Error),
    #[error("the kernel's BTF is not understood: {0}")]
    Malformed(&'static str),
    #[error("the kernel's BTF has no field {0}")]
    NoField(String),
}

struct Type {
    name: u32,
    kind: u32,
    /// The type that a modifier or typedef refers to; a size for others.
    size_or_type: u32,
    members: Vec<Member>,
}

struct Member {
    name: u32,
    type_id: u32,
    /// Of an enum's member, its value.
    offset_bits: u32,
}

impl Btf {
    /// The running kernel's.
    pub(super) fn of_kernel() -> Result<Self, BtfError> {
        let bytes = fs::read(Path::new(KERNEL_BTF)).map_err(BtfError::Absent)?;
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Self, BtfError> {
        let mut header = Words { bytes, at: 0 };
        if bytes.get(..2) != Some(&MAGIC.to_ne_bytes()) {
            return Err(BtfError::Malformed("wrong magic number"));
        }
        header.at = 4;
        let [header_size, type_at, type_size, string_at, string_size] = header.take()?;
        let section = |at: u32, size: u32| {
            let start = header_size as usize + at as usize;
            bytes
                .get(start..start + size as usize)
                .ok_or(BtfError::Malformed("a section is cut off"))
        };
        let mut words = Words {
            bytes: section(type_at, type_size)?,
            at: 0,
        };
        let void = Type {
            name: 0,
            kind: 0,
            size_or_type: 0,
            members: Vec::new(),
        };
        let mut types = vec![void];
        while words.at < words.bytes.len() {
            types.push(Type::parse(&mut words)?);
        }
        Ok(Self {
            types,
            strings: section(string_at, string_size)?.to_vec(),
        })
    }

    /// Offset in bytes of a field, such as `sk_backlog.rmem_alloc`, in a struct.
    /// The first fields of a struct may hold others of its fields (`tcp_sock`
    /// begins with a `sock`), so each part is searched for in embedded structs.
    pub(super) fn offset(&self, structure: &str, path: &str) -> Result<u32, BtfError> {
        let unknown = || BtfError::NoField(format!("{structure}.{path}"));
        let of_name = |typ: &&Type| typ.kind == KIND_STRUCT && self.is_text(typ.name, structure);
        let mut typ = self.types.iter().find(of_name).ok_or_else(unknown)?;
        let mut bits = 0;
        for name in path.split('.') {
            let (offset, type_id) = self.member(typ, name, 0).ok_or_else(unknown)?;
            bits += offset;
            typ = self.resolve(type_id).ok_or_else(unknown)?;
        }
        if bits % 8 == 0 {
            Ok(bits / 8)
        } else {
            Err(unknown())
        }
    }

    /// The value of a member of an enum.
    pub(super) fn enumerator(&self, enumeration: &str, name: &str) -> Result<u32, BtfError> {
        let of_name = |typ: &&Type| typ.kind == KIND_ENUM && self.is_text(typ.name, enumeration);
        let typ = self.types.iter().find(of_name);
        let mut members = typ.iter().flat_map(|typ| &typ.members);
        members
            .find(|member| self.is_text(member.name, name))
            .map(|member| member.offset_bits)
            .ok_or_else(|| BtfError::NoField(format!("{enumeration}.{name}")))
    }

    /// Bit offset and type of a member, also one of an anonymous member.
    fn member(&self, typ: &Type, name: &str, depth: u32) -> Option<(u32, u32)> {
        if depth > MAX_DEPTH {
            return None;
        }
        let direct = typ
            .members
            .iter()
            .find(|member| self.is_text(member.name, name));
        if let Some(member) = direct {
            return Some((member.offset_bits, member.type_id));
        }
        typ.members
            .iter()
            .filter(|member| member.name == 0)
            .find_map(|member| {
                let (offset, type_id) =
                    self.member(self.resolve(member.type_id)?, name, depth + 1)?;
                Some((member.offset_bits + offset, type_id))
            })
    }

    /// Follows typedefs and modifiers to the type itself.
    fn resolve(&self, type_id: u32) -> Option<&Type> {
        let mut typ = self.types.get(type_id as usize)?;
        // TYPEDEF, VOLATILE, CONST, RESTRICT and TYPE_TAG; never a long chain.
        for _ in 0..MAX_DEPTH {
            match typ.kind {
                8..=11 | 18 => typ = self.types.get(typ.size_or_type as usize)?,
                _ => break,
            }
        }
        Some(typ)
    }

    /// Whether this is the text at `offset`, which a zero ends. There are a hundred
    /// thousand of them to compare with.
    fn is_text(&self, offset: u32, text: &str) -> bool {
        let from = self.strings.get(offset as usize..).unwrap_or_default();
        from.strip_prefix(text.as_bytes())
            .is_some_and(|rest| rest.first() == Some(&0))
    }
}

impl Type {
    fn parse(words: &mut Words<'_>) -> Result<Self, BtfError> {
        let [name, info, size_or_type] = words.take()?;
        let kind = info >> 24 & 0x1f;
        let count = info & 0xffff;
        let bitfields = info >> 31 == 1;
        let mut members = Vec::new();
        match kind {
            KIND_STRUCT | KIND_UNION => {
                for _ in 0..count {
                    let [name, type_id, offset] = words.take()?;
                    // With bit fields in the struct the top byte is the size.
                    let offset_bits = if bitfields {
                        offset & 0x00ff_ffff
                    } else {
                        offset
                    };
                    members.push(Member {
                        name,
                        type_id,
                        offset_bits,
                    });
                }
            }
            KIND_INT | KIND_VAR | KIND_DECL_TAG => words.skip(1)?,
            KIND_ARRAY => words.skip(3)?,
            KIND_ENUM => {
                for _ in 0..count {
                    let [name, value] = words.take()?;
                    members.push(Member {
                        name,
                        type_id: 0,
                        offset_bits: value,
                    });
                }
            }
            KIND_FUNC_PROTO => words.skip(2 * count)?,
            KIND_DATASEC | KIND_ENUM64 => words.skip(3 * count)?,
            _ => {}
        }
        Ok(Self {
            name,
            kind,
            size_or_type,
            members,
        })
    }
}

struct Words<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Words<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u32; N], BtfError> {
        let mut words = [0; N];
        for word in &mut words {
            let bytes = self.bytes.get(self.at..self.at + 4);
            let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
            *word = u32::from_ne_bytes(bytes.ok_or(BtfError::Malformed("it ends early"))?);
            self.at += 4;
        }
        Ok(words)
    }

    fn skip(&mut self, words: u32) -> Result<(), BtfError> {
        self.at += 4 * words as usize;
        if self.at <= self.bytes.len() {
            Ok(())
        } else {
            Err(BtfError::Malformed("it ends early"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRINGS: &[u8] = b"\0outer\0inner\0a\0b\0";

    /// struct outer { u32 a; struct { u32 b; }; }
    fn sample() -> Vec<u8> {
        let info = |kind: u32, count: u32| kind << 24 | count;
        let types = [
            [0, info(KIND_INT, 0), 4].as_slice(),
            &[32],
            &[0, info(KIND_STRUCT, 1), 4],
            &[15, 1, 0],
            &[1, info(KIND_STRUCT, 2), 8],
            &[13, 1, 0],
            &[0, 2, 32],
        ]
        .concat();
        let size = 4 * types.len() as u32;
        let mut bytes = MAGIC.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        for word in [24, 0, size, size, STRINGS.len() as u32]
            .into_iter()
            .chain(types)
        {
            bytes.extend(u32::to_ne_bytes(word));
        }
        bytes.extend(STRINGS);
        bytes
    }

    #[test]
    fn a_member_of_an_anonymous_struct_is_found_at_its_own_offset() {
        let btf = Btf::parse(&sample()).unwrap();
        assert_eq!(btf.offset("outer", "a").unwrap(), 0);
        assert_eq!(btf.offset("outer", "b").unwrap(), 4);
        assert!(matches!(
            btf.offset("outer", "c"),
            Err(BtfError::NoField(_))
        ));
    }

    #[test]
    fn cut_off_input_is_an_error_at_every_length() {
        let bytes = sample();
        for length in 0..bytes.len() {
            assert!(Btf::parse(&bytes[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn the_running_kernels_fields_are_found_where_it_has_btf() {
        let btf = match Btf::of_kernel() {
            Ok(btf) => btf,
            Err(BtfError::Absent(_)) => return,
            Err(error) => panic!("{error}"),
        };
        for (structure, path) in [
            ("tcp_sock", "write_seq"),
            ("sock", "sk_backlog.rmem_alloc"),
            ("sock", "sk_shutdown"),
        ] {
            assert!(btf.offset(structure, path).unwrap() > 0, "{path}");
        }
    }
}
