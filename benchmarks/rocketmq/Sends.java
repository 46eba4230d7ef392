import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends transactional messages whose local transaction commits at once: name server, topic, body, threads, seconds to
 * warm up, seconds to measure. Prints sends a second, and the median and the 99th percentile of a send in milliseconds.
 */
public class Sends {

    static final int EACH_MAX = 4_000_000;
    static final int SEND_MS_MAX = 30_000;
    static final int ROUTE_MS_MAX = 30_000;

    public static void main(String[] args) {
        try {
            measure(args);
            System.exit(0); // the client's own timers would keep it alive
        } catch (Throwable problem) {
            problem.printStackTrace();
            System.exit(1);
        }
    }

    static void measure(String[] args) throws Exception {
        String topic = args[1];
        byte[] body = args[2].getBytes(StandardCharsets.UTF_8);
        int threads = Integer.parseInt(args[3]);
        TransactionMQProducer producer = new TransactionMQProducer("bench");
        producer.setNamesrvAddr(args[0]);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object arg) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.setSendMsgTimeout(SEND_MS_MAX); // a busy disk takes its time
        producer.start();
        sendFirst(producer, topic, body);
        double warmUp = Double.parseDouble(args[4]);
        if (warmUp > 0) {
            run(producer, topic, body, threads, warmUp);
        }
        System.out.println(run(producer, topic, body, threads, Double.parseDouble(args[5])));
        producer.shutdown();
    }

    /** The name server learns of a new topic, and of a new broker, after a while. */
    static void sendFirst(TransactionMQProducer producer, String topic, byte[] body) throws Exception {
        long end = System.currentTimeMillis() + ROUTE_MS_MAX;
        while (true) {
            try {
                producer.sendMessageInTransaction(new Message(topic, "", "12345", body), null);
                return;
            } catch (MQClientException noRoute) {
                if (System.currentTimeMillis() > end) {
                    throw noRoute;
                }
                Thread.sleep(100);
            }
        }
    }

    static String run(TransactionMQProducer producer, String topic, byte[] body, int threads, double seconds)
            throws Exception {
        long[][] each = new long[threads][];
        Throwable[] failed = new Throwable[1];
        Thread[] running = new Thread[threads];
        long began = System.nanoTime();
        long end = began + (long) (seconds * 1e9);
        for (int i = 0; i < threads; i++) {
            int mine = i;
            running[i] = new Thread(() -> {
                try {
                    each[mine] = sendUntil(producer, topic, body, end);
                } catch (Throwable problem) {
                    failed[0] = problem;
                }
            });
            running[i].start();
        }
        for (Thread thread : running) {
            thread.join();
        }
        double took = (System.nanoTime() - began) / 1e9;
        if (failed[0] != null) {
            throw new IllegalStateException("a send failed", failed[0]);
        }
        long[] all = Arrays.stream(each).flatMapToLong(Arrays::stream).sorted().toArray();
        double median = all[all.length / 2] / 1e6;
        double p99 = all[(int) (all.length * 0.99)] / 1e6;
        return all.length / took + " " + median + " " + p99;
    }

    static long[] sendUntil(TransactionMQProducer producer, String topic, byte[] body, long end) throws Exception {
        long[] took = new long[1024];
        int count = 0;
        for (long start = System.nanoTime(); start < end && count < EACH_MAX; start = System.nanoTime()) {
            Message message = new Message(topic, "", "12345", body);
            TransactionSendResult result = producer.sendMessageInTransaction(message, null);
            if (result.getLocalTransactionState() != LocalTransactionState.COMMIT_MESSAGE) {
                throw new IllegalStateException("not committed: " + result);
            }
            if (count == took.length) {
                took = Arrays.copyOf(took, 2 * count);
            }
            took[count++] = System.nanoTime() - start;
        }
        return Arrays.copyOf(took, count);
    }
}
