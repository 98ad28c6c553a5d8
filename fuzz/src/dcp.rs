//! The metadata that torch would write for a checkpoint with one tensor of one chunk, and archives
//! with the sums that they should have.

/// Writes a pickle of protocol 2.
struct Pickler(Vec<u8>);

impl Pickler {
    fn text(&mut self, text: &str) {
        self.0.push(b'X');
        self.0.extend((text.len() as u32).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn int(&mut self, n: usize) {
        self.0.extend([0x8a, 8]);
        self.0.extend((n as u64).to_le_bytes());
    }

    fn global(&mut self, module: &str, name: &str) {
        self.0.extend(format!("c{module}\n{name}\n").bytes());
    }

    fn sizes(&mut self, sizes: &[usize]) {
        self.0.push(b'(');
        sizes.iter().for_each(|n| self.int(*n));
        self.0.push(b't');
    }

    /// An object with these fields, each of which a function writes.
    fn object(&mut self, module: &str, class: &str, fields: &[(&str, &dyn Fn(&mut Self))]) {
        self.global(&format!("torch.distributed.checkpoint.{module}"), class);
        self.0.extend(b")\x81}(");
        for (name, write) in fields {
            self.text(name);
            write(self);
        }
        self.0.extend(b"ub");
    }
}

/// The metadata for tensor `x`, all of which is one item of `length` bytes in file `f`.
pub fn metadata(dtype: &str, shape: &[usize], length: usize) -> Vec<u8> {
    let start = vec![0; shape.len()];
    let properties = |p: &mut Pickler| {
        p.object(
            "metadata",
            "TensorProperties",
            &[("dtype", &|p| p.global("torch", dtype))],
        )
    };
    let chunk = |p: &mut Pickler| {
        p.object(
            "metadata",
            "ChunkStorageMetadata",
            &[
                ("offsets", &|p| p.sizes(&start)),
                ("sizes", &|p| p.sizes(shape)),
            ],
        )
    };
    let chunks = |p: &mut Pickler| {
        p.0.push(b'(');
        chunk(p);
        p.0.push(b'l');
    };
    let tensor = |p: &mut Pickler| {
        p.object(
            "metadata",
            "TensorStorageMetadata",
            &[
                ("properties", &properties),
                ("size", &|p| p.sizes(shape)),
                ("chunks", &chunks),
            ],
        )
    };
    let index = |p: &mut Pickler| {
        p.object(
            "metadata",
            "MetadataIndex",
            &[("fqn", &|p| p.text("x")), ("offset", &|p| p.sizes(&start))],
        )
    };
    let place = |p: &mut Pickler| {
        let fields: [(&str, &dyn Fn(&mut Pickler)); 3] = [
            ("relative_path", &|p| p.text("f")),
            ("offset", &|p| p.int(0)),
            ("length", &|p| p.int(length)),
        ];
        p.object("filesystem", "_StorageInfo", &fields);
    };
    let tensors = |p: &mut Pickler| {
        p.0.extend(b"}(");
        p.text("x");
        tensor(p);
        p.0.push(b'u');
    };
    let places = |p: &mut Pickler| {
        p.0.extend(b"}(");
        index(p);
        place(p);
        p.0.push(b'u');
    };
    let mut out = Pickler(vec![0x80, 2]);
    out.object(
        "metadata",
        "Metadata",
        &[("state_dict_metadata", &tensors), ("storage_data", &places)],
    );
    out.0.push(b'.');
    out.0
}

/// Puts the right sum into every directory entry whose bytes can be found, because no mutation
/// does: a reader that checks sums would never be seen behind them.
pub fn with_sums(mut archive: Vec<u8>) -> Vec<u8> {
    let number = |bytes: &[u8], at: usize, width: usize| {
        bytes
            .get(at..at + width)
            .map(|b| b.iter().rev().fold(0usize, |n, b| n << 8 | usize::from(*b)))
    };
    for at in 0..archive.len().saturating_sub(46) {
        if !archive[at..].starts_with(b"PK\x01\x02") {
            continue;
        }
        let (Some(size), Some(header)) =
            (number(&archive, at + 24, 4), number(&archive, at + 42, 4))
        else {
            continue;
        };
        let (Some(name), Some(extra)) = (
            number(&archive, header + 26, 2),
            number(&archive, header + 28, 2),
        ) else {
            continue;
        };
        let start = header + 30 + name + extra;
        if let Some(bytes) = archive.get(start..start + size) {
            let sum = crc32(bytes);
            archive[at + 16..at + 20].copy_from_slice(&sum.to_le_bytes());
        }
    }
    archive
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    };
    !bytes.iter().fold(!0, step)
}
