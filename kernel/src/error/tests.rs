use super::*;

/// One of each variant, all of `op` or of `device`.
fn all(op: &'static str, device: &str) -> Vec<Error> {
    let text = String::new;
    let x = || OperandType::from(&Shape::from([2]));
    vec![
        Error::shape(op, [x()], text()),
        Error::Axis {
            op,
            axis: 3,
            rank: 2,
        },
        Error::DType {
            op,
            dtype: DType::F32,
            expected: "an integer",
        },
        Error::argument(op, "k", text()).of([x()]),
        Error::DeviceMismatch {
            op,
            left: device.into(),
            right: text(),
        },
        Error::Rule {
            op,
            rule: text(),
            detail: text(),
        },
        Error::MeshMismatch {
            op,
            left: text(),
            right: text(),
        },
        Error::ImplicitCommunication {
            op,
            caller: text(),
            choices: [].into(),
        },
        Error::Transport {
            op,
            detail: text(),
            ranks: vec![],
        },
        Error::Timeout {
            op,
            seconds: 1.0,
            missing: [].into(),
            detail: text(),
        },
        Error::Lost {
            op,
            ranks: [].into(),
            detail: text(),
        },
        Error::Elsewhere {
            op,
            rank: 0,
            error: text(),
        },
        Error::Diverged {
            calls: Box::new([0, 1].map(|rank| RankCall {
                rank,
                op: op.into(),
                caller: text(),
            })),
        },
        Error::Promotion {
            op,
            left: DType::F32,
            right: DType::BF16,
            to: DType::F32,
        },
        Error::gradient(op, NoGradient::Unused, text()),
        Error::IndexOutOfRange {
            op,
            index: 1,
            len: 1,
        },
        Error::DivisionByZero { op },
        Error::SizeOverflow {
            op,
            shape: Shape::from([2]).into(),
        },
        Error::Positions { op, count: 1 },
        Error::TooLarge {
            device: device.into(),
            bytes: 1,
            limit: 0,
        },
        Error::OutOfMemory {
            device: device.into(),
            bytes: 1,
        },
        Error::Unsupported {
            device: device.into(),
            what: text(),
            hint: text(),
        },
        Error::DeviceUnavailable {
            device: device.into(),
            reason: text(),
            hint: text(),
        },
        Error::DeviceFailed {
            device: device.into(),
            detail: text(),
        },
    ]
}

#[test]
fn every_message_names_the_op_or_the_device() {
    for error in all("frobnicate", "warp9") {
        let text = error.to_string();
        assert!(
            text.contains("frobnicate") || text.contains("warp9"),
            "{text}"
        );
    }
    // What belongs to no op begins with what it is about.
    for (error, start) in [
        (Error::mesh(&[], ""), "mesh: "),
        (
            Error::Sharding {
                sharding: String::new(),
                detail: String::new(),
            },
            "sharding: ",
        ),
        (
            Error::Memory {
                from: String::new(),
                to: String::new(),
                needed: 1,
                ceiling: 0,
            },
            "reshard ",
        ),
        (
            Error::Parse {
                what: "mesh",
                text: "dp".into(),
                expected: String::new(),
            },
            "cannot read 'dp' as a mesh",
        ),
    ] {
        assert!(error.to_string().starts_with(start), "{error}");
    }
}

#[test]
fn an_error_stays_small() {
    // Every `Result` makes room for it: lists and shapes are boxed.
    assert!(size_of::<Error>() <= 80);
}

#[test]
fn operands_are_told_once() {
    let (x, y) = (Shape::from([2]), Shape::from([3]));
    let error = Error::shape("add", [&x], "").of([&y]);
    assert_eq!(error, Error::shape("add", [&x], ""));
    let axis = Error::DivisionByZero { op: "div" };
    assert_eq!(axis.clone().of([&x]), axis);
}
