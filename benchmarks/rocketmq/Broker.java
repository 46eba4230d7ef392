import java.io.IOException;
import java.lang.reflect.Field;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.BrokerStartup;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.ha.DefaultHAService;

/** RocketMQ's broker, all of whose ports are on the loopback: its port for slaves knows no such setting. */
public class Broker {

    static class OnLoopback extends DefaultHAService {
        @Override
        public void init(DefaultMessageStore store) throws IOException {
            super.init(store);
            if (acceptSocketService == null) {
                return;
            }
            int port = store.getMessageStoreConfig().getHaListenPort();
            set(AcceptSocketService.class, acceptSocketService, "socketAddressListen",
                new InetSocketAddress(InetAddress.getLoopbackAddress(), port));
        }
    }

    static void set(Class<?> owner, Object object, String name, Object value) {
        try {
            Field field = owner.getDeclaredField(name);
            field.setAccessible(true);
            field.set(object, value);
        } catch (ReflectiveOperationException problem) {
            throw new IllegalStateException(problem);
        }
    }

    public static void main(String[] args) {
        BrokerController controller = BrokerStartup.createBrokerController(args);
        set(DefaultMessageStore.class, controller.getMessageStore(), "haService", new OnLoopback());
        BrokerStartup.start(controller);
    }
}
