use super::*;

/// Sizes as `global=512 micro=4`.
fn given(text: &str) -> BatchSpec {
    let mut spec = BatchSpec::default();
    for part in text.split_whitespace() {
        let (name, size) = part.split_once('=').expect("name=size");
        let size = Some(size.parse().expect("a size"));
        match name {
            "prompts" => spec.prompts = size,
            "generations" => spec.generations = size,
            "global" => spec.global = size,
            "micro" => spec.micro = size,
            "accumulation" => spec.accumulation = size,
            "dp" => spec.dp = size,
            "updates" => spec.updates = size,
            _ => panic!("{name}"),
        }
    }
    spec
}

fn refused(text: &str, said: &str) {
    match given(text).solve() {
        Err(Error::Config { key, detail }) => {
            assert_eq!((&*key, &*detail), ("batch", said), "{text}");
        }
        other => panic!("{text}: {other:?}"),
    }
}

/// The recorded facts about batch arithmetic.
#[test]
fn sizes_are_those_of_the_facts() {
    let sizes = given("global=512 micro=4 dp=8")
        .solve()
        .expect("they agree");
    assert_eq!(sizes.accumulation, 16);
    refused(
        "global=100 micro=4 dp=8",
        "global batch 100 is not a multiple of micro batch 4 x dp 8 = 32: the nearest are 96 and 128",
    );
    let sizes = given("prompts=64 generations=8 micro=4 dp=4 updates=2");
    let sizes = sizes.solve().expect("they agree");
    assert_eq!(
        (sizes.sequences, sizes.global, sizes.accumulation),
        (512, 256, 16)
    );
    refused(
        "prompts=6 generations=8 micro=1 dp=7",
        "6 prompts x 8 generations = 48 sequences are not a multiple of micro batch 1 x dp 7 = 7: the nearest are 42 and 49",
    );
}

#[test]
fn any_sizes_give_the_rest() {
    // prompts, generations, sequences, updates, global, accumulation, micro, dp
    for (text, expected) in [
        ("global=512", [512, 1, 512, 1, 512, 1, 512, 1]),
        ("micro=4", [4, 1, 4, 1, 4, 1, 4, 1]),
        ("prompts=6", [6, 1, 6, 1, 6, 1, 6, 1]),
        ("global=512 dp=8", [512, 1, 512, 1, 512, 1, 64, 8]),
        (
            "global=512 accumulation=4 dp=8",
            [512, 1, 512, 1, 512, 4, 16, 8],
        ),
        ("micro=4 accumulation=2 dp=8", [64, 1, 64, 1, 64, 2, 4, 8]),
        (
            "prompts=64 global=512 micro=4 dp=8",
            [64, 8, 512, 1, 512, 16, 4, 8],
        ),
        (
            "generations=8 global=512 micro=4 dp=8",
            [64, 8, 512, 1, 512, 16, 4, 8],
        ),
        (
            "prompts=64 generations=8 global=128",
            [64, 8, 512, 4, 128, 1, 128, 1],
        ),
        (
            "prompts=64 generations=8 updates=4 dp=4",
            [64, 8, 512, 4, 128, 1, 32, 4],
        ),
        (
            "prompts=64 generations=8 micro=2 accumulation=4 dp=8",
            [64, 8, 512, 8, 64, 4, 2, 8],
        ),
        (
            "global=32 micro=4 accumulation=2 dp=4 updates=3",
            [96, 1, 96, 3, 32, 2, 4, 4],
        ),
    ] {
        let sizes = given(text)
            .solve()
            .unwrap_or_else(|e| panic!("{text}: {e}"));
        let found = [
            sizes.prompts,
            sizes.generations,
            sizes.sequences,
            sizes.updates,
            sizes.global,
            sizes.accumulation,
            sizes.micro,
            sizes.dp,
        ];
        assert_eq!(found, expected, "{text}");
    }
}

#[test]
fn whatever_is_given_agrees_or_is_refused() {
    let choices = [None, Some(1), Some(2), Some(3), Some(12)];
    let mut solved = 0;
    for number in 0..5usize.pow(7) {
        let mut rest = number;
        let mut spec = BatchSpec::default();
        for (_, size) in spec.terms() {
            *size = choices[rest % 5];
            rest /= 5;
        }
        let Ok(sizes) = spec.solve() else {
            continue;
        };
        solved += 1;
        assert_eq!(
            sizes.sequences,
            sizes.prompts * sizes.generations,
            "{spec:?}"
        );
        assert_eq!(sizes.sequences, sizes.global * sizes.updates, "{spec:?}");
        assert_eq!(
            sizes.global,
            sizes.micro * sizes.accumulation * sizes.dp,
            "{spec:?}"
        );
        let found = BatchSpec {
            prompts: Some(sizes.prompts),
            generations: Some(sizes.generations),
            global: Some(sizes.global),
            micro: Some(sizes.micro),
            accumulation: Some(sizes.accumulation),
            dp: Some(sizes.dp),
            updates: Some(sizes.updates),
        };
        let (mut spec, mut found) = (spec, found);
        for ((name, given), (_, found)) in spec.terms().into_iter().zip(found.terms()) {
            assert!(given.is_none() || *given == *found, "{name} was given");
        }
    }
    assert!(solved > 5_000, "{solved}");
}

#[test]
fn contradictions_say_what_would_do() {
    for (text, said) in [
        (
            "global=512 micro=4 accumulation=8 dp=8",
            "global batch 512 is not micro batch 4 x accumulation 8 x dp 8 = 256: 256 would do, or give micro batch 8 or accumulation 16 or dp 16",
        ),
        (
            "global=7 micro=4 accumulation=8 dp=8",
            "global batch 7 is not micro batch 4 x accumulation 8 x dp 8 = 256: 256 would do",
        ),
        (
            "prompts=64 generations=8 global=100",
            "64 prompts x 8 generations = 512 sequences are not a multiple of global batch 100: the nearest are 500 and 600",
        ),
        (
            "prompts=64 generations=8 global=128 updates=3",
            "64 prompts x 8 generations = 512 sequences are not global batch 128 x updates 3 = 384: 384 would do, or give updates 4",
        ),
        (
            "prompts=6 generations=8 micro=1 dp=5 updates=2",
            "6 prompts x 8 generations = 48 sequences are not a multiple of micro batch 1 x dp 5 x updates 2 = 10: the nearest are 40 and 50",
        ),
        (
            "prompts=6 generations=8 updates=5",
            "6 prompts x 8 generations = 48 sequences are not a multiple of updates 5: the nearest are 45 and 50",
        ),
        (
            "generations=3 global=64",
            "64 sequences are not a multiple of generations 3: the nearest are 63 and 66",
        ),
        (
            "global=3 dp=8",
            "global batch 3 is not a multiple of dp 8: the nearest is 8",
        ),
        (
            "global=0 micro=4",
            "global batch is 0: at least 1 is needed",
        ),
        ("global=4 updates=0", "updates is 0: at least 1 is needed"),
        (
            "dp=8 accumulation=2",
            "none of global batch, micro batch and prompts is given: how many sequences is up to you",
        ),
        (
            "micro=4294967296 accumulation=4294967296 dp=2",
            "micro batch 4294967296 x accumulation 4294967296 x dp 2 is more than 2^64",
        ),
        (
            "prompts=18446744073709551615 generations=2",
            "prompts 18446744073709551615 x generations 2 is more than 2^64",
        ),
        (
            "global=18446744073709551615 micro=2",
            "global batch 18446744073709551615 is not a multiple of micro batch 2: the nearest is 18446744073709551614",
        ),
    ] {
        refused(text, said);
    }
}

#[test]
fn unknown_sizes_in_a_configuration_are_errors() {
    let read = |text: &str| toml::from_str::<BatchSpec>(text);
    let spec = read("global = 512\nmicro = 4").expect("both are known");
    assert_eq!(spec, given("global=512 micro=4"));
    assert!(read("batch = 512").is_err());
    assert_eq!(
        toml::to_string(&spec).expect("text"),
        "global = 512\nmicro = 4\n"
    );
}
