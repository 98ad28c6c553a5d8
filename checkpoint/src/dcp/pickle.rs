//! A reader of pickles that executes nothing: every global it meets must be on a list of plain data
//! types, and what would be a call becomes a record of it.

use crate::{Error, Result};
use std::collections::HashMap;
use std::path::Path;

/// Where a value is in its [`Pickle`]. Values are shared and may refer to each other in circles, so
/// they are not nested.
pub(super) type Id = usize;

/// One value of a pickle.
#[derive(Debug, Clone)]
pub(super) enum Node {
    None,
    Int(i64),
    Text(String),
    /// What checkpoints do not need, kept only as being there: logical values, floats, longer
    /// numbers, bytes.
    Other,
    /// Tuples, lists and sets.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// Module and name, with a dot between.
    Global(String),
    /// What a class or function would have been called with, and the state that was set afterwards.
    Object {
        class: Id,
        args: Id,
        state: Option<Id>,
        items: Vec<(Id, Id)>,
    },
    /// A reference to something outside, such as a storage.
    Persistent(Id),
}

/// The values of a pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    nodes: Vec<Node>,
    pub(super) root: Id,
}

const WHAT: &str = "pickle of torch.distributed.checkpoint";

/// As many dimensions as a tensor of torch can have. A list may be shared by many objects, so that
/// sizes without a limit could take far more memory than the file.
const MOST_DIMENSIONS: usize = 64;

/// More fields than any of the classes has.
const MOST_FIELDS: usize = 64;

/// Names that stand for data. Classes that are not needed are listed where files written by torch
/// have them.
const ALLOWED: [&str; 42] = [
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    // Before torch 2.3 the properties were those of sharded tensors.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    "torch.Size",
    "torch.device",
    "torch.strided",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch.storage.UntypedStorage",
    "torch.FloatStorage",
    "torch.DoubleStorage",
    "torch.HalfStorage",
    "torch.BFloat16Storage",
    "torch.BoolStorage",
    "torch.ByteStorage",
    "torch.CharStorage",
    "torch.ShortStorage",
    "torch.IntStorage",
    "torch.LongStorage",
    "collections.OrderedDict",
    "collections.defaultdict",
    "builtins.set",
    "__builtin__.set",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
];

/// The element types of torch, whether or not this library has them.
const DTYPES: [&str; 25] = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "qint8",
    "quint8",
    "qint32",
];

impl Pickle {
    pub(super) fn node(&self, id: Id) -> &Node {
        self.nodes.get(id).unwrap_or(&Node::None)
    }

    pub(super) fn text(&self, id: Id) -> Option<&str> {
        if let Node::Text(text) = self.node(id) {
            Some(text)
        } else {
            None
        }
    }

    pub(super) fn int(&self, id: Id) -> Option<i64> {
        if let Node::Int(n) = self.node(id) {
            Some(*n)
        } else {
            None
        }
    }

    /// A list or tuple.
    pub(super) fn list(&self, id: Id) -> Option<&[Id]> {
        if let Node::List(items) = self.node(id) {
            Some(items)
        } else {
            None
        }
    }

    /// The pairs of a dictionary, also of an ordered one.
    pub(super) fn pairs(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.node(id) {
            Node::Dict(items) | Node::Object { items, .. } => Some(items),
            _ => None,
        }
    }

    pub(super) fn global(&self, id: Id) -> Option<&str> {
        if let Node::Global(name) = self.node(id) {
            Some(name)
        } else {
            None
        }
    }

    /// The arguments and the state of an object whose class ends in `name`.
    pub(super) fn object(&self, id: Id, name: &str) -> Option<(&[Id], Option<Id>)> {
        let Node::Object {
            class, args, state, ..
        } = self.node(id)
        else {
            return None;
        };
        let short = self.global(*class)?.rsplit('.').next()?;
        (short == name).then(|| (self.list(*args).unwrap_or_default(), *state))
    }

    /// A field of an object's state. No class has many, and a state may be shared by many objects:
    /// only the first are looked at.
    pub(super) fn field(&self, id: Id, class: &str, field: &str) -> Option<Id> {
        let (_, state) = self.object(id, class)?;
        self.pairs(state?)?
            .iter()
            .take(MOST_FIELDS)
            .find(|(key, _)| self.text(*key) == Some(field))
            .map(|(_, value)| *value)
    }

    /// Sizes: a `torch.Size`, a tuple or a list of numbers that are not negative.
    pub(super) fn sizes(&self, id: Id) -> Option<Vec<usize>> {
        let list = match self.object(id, "Size") {
            Some((args, _)) => self.list(*args.first()?)?,
            None => self.list(id)?,
        };
        if list.len() > MOST_DIMENSIONS {
            return None;
        }
        list.iter()
            .map(|&n| usize::try_from(self.int(n)?).ok())
            .collect()
    }
}

/// Reads a pickle of protocol 2 to 5. `path` is where it came from, for errors.
pub(super) fn read(bytes: &[u8], path: &Path) -> Result<Pickle> {
    let mut reader = Reader {
        bytes,
        at: 0,
        path,
        nodes: vec![],
        stack: vec![],
        marks: vec![],
        memo: HashMap::new(),
    };
    while !reader.step()? {}
    let root = reader.pop()?;
    Ok(Pickle {
        nodes: reader.nodes,
        root,
    })
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
    path: &'b Path,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    /// How high the stack was at each mark.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

impl<'b> Reader<'b> {
    fn wrong(&self, detail: impl Into<String>) -> Error {
        Error::format(
            self.path,
            WHAT,
            format!("at byte {}: {}", self.at, detail.into()),
        )
    }

    fn take(&mut self, count: usize) -> Result<&'b [u8]> {
        let end = self
            .at
            .checked_add(count)
            .filter(|&end| end <= self.bytes.len())
            .ok_or_else(|| self.wrong("it ends too early"))?;
        let out = &self.bytes[self.at..end];
        self.at = end;
        Ok(out)
    }

    /// An unsigned little-endian number of up to eight bytes.
    fn number(&mut self, bytes: usize) -> Result<u64> {
        Ok(self
            .take(bytes)?
            .iter()
            .rev()
            .fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    /// As many bytes as a number before them says.
    fn counted(&mut self, width: usize) -> Result<&'b [u8]> {
        let count = self.number(width)?;
        self.take(usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Result<String> {
        let length = self.bytes[self.at..]
            .iter()
            .position(|&b| b == b'\n')
            .ok_or_else(|| self.wrong("a line does not end"))?;
        let line = self.take(length + 1)?;
        self.utf8(&line[..length])
    }

    fn utf8(&self, bytes: &[u8]) -> Result<String> {
        String::from_utf8(bytes.into()).map_err(|_| self.wrong("a text is not UTF-8"))
    }

    fn pop(&mut self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.wrong("the stack is empty"));
        }
        self.stack
            .pop()
            .ok_or_else(|| self.wrong("the stack is empty"))
    }

    fn top(&self) -> Result<Id> {
        self.stack
            .last()
            .copied()
            .ok_or_else(|| self.wrong("the stack is empty"))
    }

    fn popped(&mut self, count: usize) -> Result<Vec<Id>> {
        let mut out = (0..count).map(|_| self.pop()).collect::<Result<Vec<_>>>()?;
        out.reverse();
        Ok(out)
    }

    fn since_mark(&mut self) -> Result<Vec<Id>> {
        let mark = self
            .marks
            .pop()
            .ok_or_else(|| self.wrong("there is no mark"))?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    fn push_text(&mut self, bytes: &[u8]) -> Result<()> {
        let text = self.utf8(bytes)?;
        self.push(Node::Text(text));
        Ok(())
    }

    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        let global = format!("{module}.{name}");
        if ALLOWED.contains(&global.as_str()) || (module == "torch" && DTYPES.contains(&name)) {
            self.push(Node::Global(global));
            return Ok(());
        }
        Err(Error::ForbiddenGlobal {
            path: self.path.into(),
            global,
        })
    }

    fn push_object(&mut self, parts: &[Id]) -> Result<()> {
        let &[class, args] = parts else {
            return Err(self.wrong("a call has a class and arguments"));
        };
        if !matches!(self.nodes[class], Node::Global(_))
            || !matches!(self.nodes[args], Node::List(_))
        {
            return Err(self.wrong("something that is not a class is called"));
        }
        self.push(Node::Object {
            class,
            args,
            state: None,
            items: vec![],
        });
        Ok(())
    }

    fn push_long(&mut self, bytes: &[u8]) {
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        self.push(match wide.get_mut(..bytes.len()) {
            Some(low) => {
                low.copy_from_slice(bytes);
                Node::Int(i64::from_le_bytes(wide))
            }
            None => Node::Other,
        });
    }

    fn append(&mut self, new: Vec<Id>) -> Result<()> {
        let target = self.top()?;
        match &mut self.nodes[target] {
            Node::List(list) => list.extend(new),
            // A set that is built by a call.
            Node::Object { .. } => {}
            _ => return Err(self.wrong("only lists can be appended to")),
        }
        Ok(())
    }

    fn set_items(&mut self, new: &[Id]) -> Result<()> {
        if !new.len().is_multiple_of(2) {
            return Err(self.wrong("a key has no value"));
        }
        let target = self.top()?;
        match &mut self.nodes[target] {
            Node::Dict(items) | Node::Object { items, .. } => {
                items.extend(new.chunks_exact(2).map(|pair| (pair[0], pair[1])))
            }
            _ => return Err(self.wrong("only dictionaries have items")),
        }
        Ok(())
    }

    fn remember(&mut self, key: u64) -> Result<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Result<()> {
        let id = *self
            .memo
            .get(&key)
            .ok_or_else(|| self.wrong(format!("nothing was remembered as {key}")))?;
        self.stack.push(id);
        Ok(())
    }

    /// Carries out one opcode; `true` when it was the last. The letters are those of Python's
    /// `pickletools`.
    fn step(&mut self) -> Result<bool> {
        let opcode = self.take(1)?[0];
        match opcode {
            b'.' => return Ok(true),
            0x80 => match self.number(1)? {
                2..=5 => {}
                other => return Err(self.wrong(format!("protocol {other} is not one of 2 to 5"))),
            },
            0x95 => drop(self.take(8)?),
            b'N' => self.push(Node::None),
            0x88 | 0x89 => self.push(Node::Other),
            b'K' => self.take(1).map(|b| self.push_long(&[b[0], 0]))?,
            b'M' => self.take(2).map(|b| self.push_long(&[b[0], b[1], 0]))?,
            b'J' => self.take(4).map(|b| self.push_long(b))?,
            0x8a => self.counted(1).map(|b| self.push_long(b))?,
            0x8b => self.counted(4).map(|b| self.push_long(b))?,
            b'G' => self.take(8).map(|_| self.push(Node::Other))?,
            0x8c => self.counted(1).and_then(|b| self.push_text(b))?,
            b'X' => self.counted(4).and_then(|b| self.push_text(b))?,
            0x8d => self.counted(8).and_then(|b| self.push_text(b))?,
            b'C' => self.counted(1).map(|_| self.push(Node::Other))?,
            b'B' => self.counted(4).map(|_| self.push(Node::Other))?,
            0x8e | 0x96 => self.counted(8).map(|_| self.push(Node::Other))?,
            b')' | b']' | 0x8f => self.push(Node::List(vec![])),
            b'}' => self.push(Node::Dict(vec![])),
            0x85..=0x87 => self
                .popped(usize::from(opcode - 0x84))
                .map(|items| self.push(Node::List(items)))?,
            b't' | b'l' | 0x91 => self
                .since_mark()
                .map(|items| self.push(Node::List(items)))?,
            b'd' => {
                let items = self.since_mark()?;
                self.push(Node::Dict(vec![]));
                self.set_items(&items)?;
            }
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'2' => self.top().map(|top| self.stack.push(top))?,
            b'a' => self.popped(1).and_then(|items| self.append(items))?,
            b'e' | 0x90 => self.since_mark().and_then(|items| self.append(items))?,
            b's' => self.popped(2).and_then(|items| self.set_items(&items))?,
            b'u' => self.since_mark().and_then(|items| self.set_items(&items))?,
            b'q' => self.number(1).and_then(|key| self.remember(key))?,
            b'r' => self.number(4).and_then(|key| self.remember(key))?,
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' => self.number(1).and_then(|key| self.recall(key))?,
            b'j' => self.number(4).and_then(|key| self.recall(key))?,
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push_global(&module, &name)?;
            }
            0x93 => {
                let parts = self.popped(2)?;
                match (&self.nodes[parts[0]], &self.nodes[parts[1]]) {
                    (Node::Text(module), Node::Text(name)) => {
                        let (module, name) = (module.clone(), name.clone());
                        self.push_global(&module, &name)?;
                    }
                    _ => return Err(self.wrong("the name of a global is not a text")),
                }
            }
            b'R' | 0x81 => self.popped(2).and_then(|parts| self.push_object(&parts))?,
            0x92 => self
                .popped(3)
                .and_then(|parts| self.push_object(&parts[..2]))?,
            b'b' => {
                let new = self.pop()?;
                let target = self.top()?;
                match &mut self.nodes[target] {
                    Node::Object { state, .. } => *state = Some(new),
                    _ => {
                        return Err(self.wrong("a state is set on something that is not an object"));
                    }
                }
            }
            b'Q' => self.pop().map(|id| self.push(Node::Persistent(id)))?,
            other => {
                return Err(self.wrong(format!(
                    "opcode 0x{other:02x} is not one that checkpoints need"
                )));
            }
        }
        Ok(false)
    }
}
