"""Pairs of answers (prediction, gold), by what they try; written for this project."""

EQUAL = {
    "integers": [
        ("42", "42"), ("042", "42"), ("+7", "7"), ("−5", "-5"), ("５", "5"), ("(12)", "12"),
        ("100.", "100"), ("17.0", "17"), ("-0", "0"), ("9" * 100_000, "9" * 100_000),
    ],
    "thousands": [
        ("1,234", "1234"), ("1234567", "1,234,567"), ("10{,}000", "10000"), ("3 500", "3500"),
        (r"7,\!250,\!000", "7250000"), (r"12\,345", "12345"), ("14 {, }208", "14208"),
        ("2,400.50", "2400.5"), ("81 million", "81,000,000"), ("4.5 billion", "4500000000"),
    ],
    "decimals": [
        (".25", "0.25"), ("0.50", "1/2"), ("3,75", "3.75"), ("1e3", "1000"), ("2.5e-2", "0.025"),
        (r"3 \times 10^{4}", "30000"), (r"6.02 \cdot 10^5", "602000"), (r"0.\overline{6}", "2/3"),
        (r"1.1\overline{6}", r"\frac{7}{6}"), ("0.3333", "1/3"), ("2.8571", r"\frac{20}{7}"),
        ("1.41421356", r"\sqrt{2}"), ("12.5664", r"4\pi"), (r"1.929 \times 10^1", "19.29"),
    ],
    "fractions": [
        (r"\frac12", "0.5"), (r"\dfrac{2}{4}", r"\tfrac{1}{2}"), (r"\frac{-1}{2}", "-.5"),
        (r"-\frac{3}{8}", "-3/8"), (r"\frac 3 4", "0.75"), (r"\frac{7}3", "7/3"),
        (r"\cfrac{1}{5}", "0.2"), ("6/8", "3/4"), (r"\frac{1,000}{3}", "1000/3"), ("½", "0.5"),
        (r"\\frac{5}{6}", r"\frac{5}{6}"), ("\frac{2}{9}", "2/9"), (r"\frac{x}{3}", "x/3"),
    ],
    "mixed numbers": [
        ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"), ("-3 4/5", "-3.8"),
        (r"137 \frac{1}{2}", "137.5"), ("2½", "5/2"), (r"12\frac38", "12.375"),
        ("1 200 1/4", "1200.25"),
    ],
    "percent": [
        ("50%", "0.5"), (r"50\%", "50"), ("35 percent", r"35\%"), ("12 pct", "12%"),
        (r"$62.5$ %", r"62.5\%"), ("1/4", "25%"), (r"7\frac{1}{2}\%", "7.5"),
    ],
    "money": [
        (r"\$10", "10"), ("$18.90", r"\$18.90"), ("1,999.95€", "1999.95"), ("£7", "7"),
        (r"5.4 \text{ cents}", "5.4"), ("24 dollars", r"\$24"), ("40 USD", "40"),
    ],
    "units": [
        (r"5 \text{ cm}", "5"), ("12 apples", "12"), (r"864 \mbox{ inches}^2", "864"),
        (r"15\text{ cm}^{2}", "15"), ("3.2 m²", "3.2"), ("10weeks", "10"), ("65 mph", "65"),
        ("48 square feet", "48"), ("9.8 m/s^2", "9.8"), (r"30 \text{ units}", "30"),
        (r"\frac{270}{7}\text{ degrees}", r"\frac{270}7"), ("3.5 hours", r"3.5\text{ hours}"),
        (r"4\sqrt{2} \text{ cm}", r"4\sqrt{2}"),
    ],
    "angles": [
        (r"90^\circ", "90"), (r"45^{\circ}", "45°"), ("30 degrees", r"30^\circ"),
        (r"\frac{\pi}{6}", r"\pi/6"), (r"\sin(90^\circ - x)", r"\cos x"),
    ],
    "names": [
        (r"f^{-1}(x) = \frac{x-1}{2}", r"\frac{x-1}{2}"), (r"\angle A = 30^\circ", "30"),
        ("x = 5", "5"), ("k=1/3", r"\frac{1}{3}"), ("f(x) = 2x + 3", "2x+3"),
        ("y = 3x - 1", "3x-1"), (r"x \in [-2, 7]", "[-2,7]"), ("x = 2 + 3 = 5", "5"),
        (r"\theta = \pi/3", r"\frac{\pi}{3}"), ("AB = 12", "12"), (r"(x, y) = (1, 2)", "(1,2)"),
        (r"\frac{\sqrt2}{2} \approx 0.707", r"\frac{\sqrt{2}}{2}"),
    ],
    "words": [
        ("Evelyn", r"\text{Evelyn}"), ("even", "Even"), (r"\text{ellipse}", "ellipse"),
        ("Tuesday.", "tuesday"), ("yes", "Yes"), (r"\mathbf{no solution}", "no solution"),
        ("True", "true"),
    ],
    "choices": [
        ("(B)", "B"), (r"\text{(C)}", "C"), ("D.", "D"), ("e", "(E)"),
        (r"\mathrm{A}", r"\textbf{A}"), ("(B) 12", "B"), ("C) 3.5", "(C)"),
        (r"\boxed{\text{(A)}}", "A"),
    ],
    "bases": [
        ("52_8", "52_{8}"), ("1011_2", "1011_{2}"), (r"4A_{16}", "4A_16"),
    ],
    "lists": [
        ("10, 4, 2", "2, 4, 10"), ("2 and 3", "3, 2"), (r"1, 2, \text{ and } 5", "1,2,5"),
        ("7 or -7", "-7, 7"), (r"\pm 3", "3, -3"),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"), ("x = 1, y = 2", "y=2, x=1"),
        ("x = 4, y = -1", "4, -1"), ("0.5, 4", r"4, \frac12"), (r"12\text{ and }13", "12, 13"),
        ("3; 5", "3, 5"), (r"60^\circ, 120^\circ", "120, 60"),
        (r"\boxed{-2} \text{ and } \boxed{1}", "1, -2"), ("n = 1, 2, 3", "1,2,3"),
    ],
    "sets": [
        (r"\{1, 2\}", r"\{2,1\}"), ("{3, 4}", r"\{4, 3\}"),
        (r"\left\{ -1, \frac12 \right\}", r"\{0.5, -1\}"), (r"\emptyset", r"\{\}"),
        (r"\varnothing", "∅"), (r"\{1\pm\sqrt{5},-2\}", r"\{-2, 1-\sqrt5, 1+\sqrt5\}"),
    ],
    "tuples": [
        ("(1, 0.5)", r"(1, \frac{1}{2})"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        ("( 6,31 , -1 )", "(6,31,-1)"), (r"\left(-\frac32, \sqrt{4}\right)", "(-1.5, 2)"),
        (r"\langle 1, 2 \rangle", "(1,2)"), (r"(7, 225^\circ)", "(7,225)"),
    ],
    "intervals": [
        (r"\{x \mid x > 2\}", r"(2, \infty)"),
        (r"x \le -1 \text{ or } x \ge 3", r"(-\infty,-1]\cup[3,\infty)"),
        (r"(3,\infty) \cup (-\infty, 2)", r"(-\infty,2) \cup (3,\infty)"),
        ("[0.5, 1)", r"[\frac12,1)"), ("x > 5", r"(5, \infty)"), (r"x \le -2", r"(-\infty, -2]"),
        (r"-2 \le x < 7", "[-2, 7)"), (r"x \in [-2,7]", r"-2 \leq x \leq 7"), ("3 < t", "t > 3"),
        ("7 > y ≥ 1", "[1,7)"), (r"x < 1 \text{ or } x > 4", r"(-\infty,1)\cup(4,\infty)"),
        ("(2, +∞)", r"(2, \infty)"),
    ],
    "matrices": [
        (r"(1, 2)", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}-1\\2\end{pmatrix}", r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}"),
        (
            r"\begin{bmatrix} 0.5 & 1 \\ 0 & 2 \end{bmatrix}",
            r"\begin{pmatrix}1/2&1\\0&2\\\end{pmatrix}",
        ),
        (
            r"\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        ),
        (
            r"\begin{pmatrix} \sqrt{4} \\ x+1 \end{pmatrix}",
            r"\begin{pmatrix} 2 \\ 1+x \end{pmatrix}",
        ),
    ],
    "roots and constants": [
        (r"\sqrt{4}", "2"), (r"\frac{\sqrt3}{3}", r"1/\sqrt{3}"), (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\sqrt[3]{8}", "2"), ("sqrt(3)/2", r"\frac{\sqrt{3}}{2}"), ("√5", r"\sqrt{5}"),
        ("2*pi", r"2\pi"), (r"\sqrt 7", r"\sqrt{7}"), (r"\pi/2", r"\frac{1}{2}\pi"),
        ("3*sqrt(13)", r"3\sqrt{13}"), (r"\frac{1}{\mathrm{e}}", r"e^{-1}"), (r"\ln(e^2)", "2"),
        (r"\log_2 8", "3"), ("2^{10}", "1024"),
        (r"\frac{1+\sqrt{5}}{2}", r"\frac12 + \frac{\sqrt5}{2}"), ("5!", "120"),
        (r"\binom{10}{3}", "120"),
    ],
    "expressions": [
        ("x^2+2x+1", "(x+1)^2"), (r"\frac{x}{7}+\frac{2}{7}", r"\frac{x+2}{7}"),
        ("3*s**2", "3s^2"), (r"2x(15x^2-4x+10)", "2*x*(15*x**2-4*x+10)"), ("11z^17", "11z^{17}"),
        ("(a+5)(b+2)", "(b+2)(a+5)"), (r"\sec^2 y", r"\tan^2 y + 1"),
        (r"\cot x", r"\frac{\cos x}{\sin x}"), (r"3R^2", "3 R^2"),
        (r"\frac{11+9a}{20}", r"\frac{9a}{20}+\frac{11}{20}"), ("x²", "x^2"),
        ("8n^2 + 4n + 1", "1+4n+8n^2"), (r"\left(x-2\right)\left(x+2\right)", "x^2-4"),
        (r"2-2p", "2(1-p)"), (r"e^{x}e^{y}", "e^{x+y}"),
    ],
    "complex": [
        ("1+2i", "2i + 1"), ("i(2-i)", "1+2i"), (r"\frac34i", r"\frac{3}{4}i"),
        ("6-5i", "6 - 5i"),
    ],
    "equations": [
        ("5x - 7y + 11z + 4 = 0", "-5x+7y-11z-4=0"), ("y = -2x", "2x + y = 0"),
        ("2x = 4y", "x = 2y"), ("x^2 + y^2 = 9", "9 = y^2 + x^2"),
    ],
    "ratios and times": [
        ("3:1", "3 : 1"), ("12:30", "12:30"),
    ],
    "texts that end in an answer": [
        ("<answer> 42 </answer>", "42"), ("**42**", "42"), ("So x = 42.", "42"),
        ("The correct option is C.", "C"), ("the answer is 42 because 6*7=42", "42"),
        (r"\text{The answer is } 42", "42"), ("The answer is **42**.", "42"),
        (r"so \boxed{4} at first, but $\boxed{5}$.", "5"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"), ("She sells 4*2=8.\n#### 8", "8"),
        ("The answer is 7.", "7"), ("Answer: 25", "25"), ("**Answer:** 3.5", "3.5"),
        (r"The final answer is $\frac{1}{3}.$ I hope it is correct.", "1/3"),
        (r"Therefore, the final answer is: \[ 12 \]", "12"), ("the answer is x + 1", "1+x"),
        ("Thus there are 34 of them.", "34"), ("We find that the total comes to $72$.", "72"),
        (r"\boxed{3}", r"We get $x = \boxed{3}$."),
        ("16", "8 + 8 = 16 in all, so she earns\n#### 16"), (r"$\frac{1}{2}$", "0.5"),
        (r"\(9\)", "9"), (r"\[ \frac{3}{4} \]", "3/4"), ("$$ 10 $$", "10"),
        ("The answer is 4 4/9.", "40/9"), ("Final Answer: The largest $n$ is 34.", "34"),
    ],
}  # fmt: skip

DIFFERENT = {
    "numbers": [
        ("41", "42"), ("", "0"), ("5", ""), (" ", " "), ("1/0", "0"), ("0.5", "0.51"),
        ("3.14", r"\pi"), ("5", "-5"), ("9" * 100_000, "8" * 100_000), ("2,5", "25"),
        ("1,2", "12"), ("5.0001", "5"), ("0.333", "1/3"), ("5 million", "5"), ("11 7/6", "73/6"),
        ("4 4/0", "4"), ("1e3", "1e4"), ("1", "0.9999"), ("100", "1"),
    ],
    "two or more": [
        ("41 ... 42", "42"), ("1 or 2 or 3", "2"), ("2 1", "3"), (r"\boxed{1}, \boxed{2}", "2"),
        ("42, 43", "42"), ("either 4 or 5", "5"), ("maybe it is about 5", "5"),
        (r"\sqrt{67}", r"\sqrt{67}, -\sqrt{85}"), ("1, 2, 3, ...", "1,2,3"), ("2 3", "6"),
        ("The answer is not 5", "5"),
    ],
    "unfinished": [
        ("2 + 3", "5"), ("37*48+12", "1788"), (r"6 \times 7", "42"), ("10 - 3", "7"),
    ],
    "parts of it": [
        ("5x", "5"), ("5 pi", "5"), (r"4\sqrt{2}", "4"), ("x + 1", "x"), ("1/3", "1"),
        (r"2^{10}", "2"), (r"1\sqrt{19}", "1"), ("(+5)(b+2)", "(a+5)(b+2)"), ("x+1", "x+2n+1"),
        (r"\frac{1}{3", "1"), ("2y", "2x"),
    ],
    "units": [
        ("5 cm", "5 m"), ("10 units", "100"), ("3 hours", "3 minutes"), ("28", "0.28"),
        ("7%", "7.5%"),
    ],
    "lists": [
        ("10, 4, 2", "4, 12, 2"), ("1,2", "1,2,3"), ("1,1,2", "1,2,2"), ("x=1, y=2", "x=2, y=1"),
        (r"32, 349", "32349"), (r"\pm 2021", "2021"), (r"1 \pm \sqrt{2}", r"1 \pm \sqrt{3}"),
    ],
    "tuples and intervals": [
        ("(1,2)", "(2,1)"), ("(1,2)", "[1,2)"), ("[-3,2]", "(-3,2)"), ("()", "0"),
        ("(0, 1)", "(0, 1.5)"),
        (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty, 2) \cup (4, \infty)"),
        ("x > 5", r"x \ge 5"), ("x < 5", "x > 5"), (r"(1, 2)", r"\{1, 2\}"),
        (r"-2 \le x \le 7", "(-2,7)"), ("5", "x > 5"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{vmatrix}1&0\\0&1\end{vmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    ],
    "words and choices": [
        ("odd", r"\text{oddd}"), ("even", "odd"), ("A", "B"), ("Evelyn", "Evelyn Smith"),
        ("p - q", r"\dfrac{3}{5}"), ("AZYUK2A", "2"), ("I do not know", "no"),
        ("E", r"\mathrm{E}*2"), ("(B) 12", "A"), ("yes", "no"),
    ],
    "expressions": [
        (r"1 - 1/\mathrm{e}", r"1 + 1/\mathrm{e}"), ("x^2+2x+1", "x^3+2x+1"), ("52_8", "52_9"),
        ("1112112_3", "1112122_3"), (r"\tfrac{1}{2} + \frac1{72}", r"\frac{1}{2} + 2/3"),
        (r"\sin x", r"\cos x"), ("x+y", "xy"), (r"\frac{1+\sqrt{5}}{2}", "2"),
        (r"\sum_{k=0}^{n-1} k", r"\sum_{k=0}^{n-2} k"), ("2i", "2"), ("x", "-x"),
    ],
    "equations": [
        ("5x - 7y + 11z + 4 = 0", "x + y - z + 2 = 0"),
        (r"\sin(x)=\frac{42}{59}", r"\cos(x)=\frac{42}{59}"), ("x + y = 3", "x + y = 4"),
        ("3", "x + y = 3"),
    ],
    "ratios and times": [
        ("3:1", "3"), ("12:00", "1:00"), ("1:3", "3:1"), ("12:00", "12"),
    ],
    "texts": [
        (r"\boxed{5} no, \boxed{6}", "5"), (r"<think>\boxed{5}</think> I am not sure", "5"),
        ("#### 4\n#### 5", "4"), ("The answer is 4 4/9.", "4"), ("the answer is", "4"),
    ],
    "hostile": [
        ("2^{2^{2^{100}}}", "5"), ("1e999999999", "5"), ("9^{9^{9^{9^{9}}}}", "3"),
        ("{" * 500, "1"), (r"\frac{1}{" * 100 + "2" + "}" * 100, "0.5"), ("\0", "1"),
        ("\ud800", "1"), ("(" * 300 + ")" * 300, "1"), (r"\sqrt{" * 150 + "2" + "}" * 150, "2"),
        ("1" + "0" * 500, "1"), ("10000000000!", "1"),
        (r"\sum_{n=1}^{10^{12}} \frac{1}{n^2}", "1"), ("99999^{99999^{9}}", "1"),
        ("x" * 2**20, "x"), (r"\int_0^1 e^{e^{e^{x^9}}} dx", "1"),
    ],
}  # fmt: skip
